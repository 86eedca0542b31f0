"""Time and memory of requests, measured side by side: ours, and those of other libraries on the same shapes."""
