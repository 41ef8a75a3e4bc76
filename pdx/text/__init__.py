"""Text on both sides of the token ids: tokenizer, chat template, incremental detokenizer. Runs in
the frontend and in the command line, never in the primary or a rank."""
