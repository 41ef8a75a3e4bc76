"""One architecture per file, run by the rank's main thread. They know no device, rank or file."""
