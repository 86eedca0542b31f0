"""The suites: what is asked, of which texts."""
