"""Tables, HTML pages and plots of plans and of compared runs."""
