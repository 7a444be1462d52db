"""Reports of a run on itself: its status, its failed tasks, and its report when it is over."""
