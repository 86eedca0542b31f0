"""What lies on disks, in buckets and on the hub: whole or not there, and never believed."""
