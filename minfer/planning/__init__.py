"""Planning a step: growth, admission from the queue, and the plan itself."""
