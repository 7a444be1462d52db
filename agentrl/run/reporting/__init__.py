"""What a run says of itself: its status, its failed tasks, and its report when it is over."""
