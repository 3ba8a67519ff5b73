"""Tables in the terminal, pages and plots of plans and of runs."""
