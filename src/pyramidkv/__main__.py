"""`python -m pyramidkv` is the command `pyramidkv`."""

from .cli import main

if __name__ == "__main__":
    main()
