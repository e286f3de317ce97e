"""States of parameters on disks and in the cloud: saved while training goes on, and restored where they are missing."""
