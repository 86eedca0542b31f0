"""From result lines to tables, plots and one page."""
