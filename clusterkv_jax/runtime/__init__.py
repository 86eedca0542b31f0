"""What every room stands on: devices, compiled programs, control flow, checks of arguments."""
