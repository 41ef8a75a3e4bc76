"""`python -m pdx` is the `pdx` command."""

from pdx.cli.entry import main

if __name__ == "__main__":
    main()
