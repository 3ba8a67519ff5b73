"""How ranks start, act as one, and end."""
