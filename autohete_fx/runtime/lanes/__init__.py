"""Work beside the device: copies, updates and the disk, by priority."""
