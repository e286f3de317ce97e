"""Plans over many devices that are not alike, and runs of them."""
