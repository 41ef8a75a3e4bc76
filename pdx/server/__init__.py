"""The frontend process: HTTP and text on one side, streams of token ids to the primary on the
other. No torch."""
