"""Claims about the planner, each with the command that checks it."""
