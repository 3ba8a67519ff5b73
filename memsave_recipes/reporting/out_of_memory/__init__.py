"""No memory left: a page that says what filled it, which flags free how much, and what the planner would have run."""
