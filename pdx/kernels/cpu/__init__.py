"""What a CPU rank needs to be quick: ops that beat their reference, and the progress store."""
