"""The plan of a job: what goes where, and what that costs."""
