"""`python -m constmem.cli` is the command `constmem`."""

from constmem.cli import main

if __name__ == "__main__":
    main()
