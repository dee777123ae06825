"""`python -m niels_gpt` runs the command `niels-gpt`."""

from niels_gpt.cli.main import main

if __name__ == "__main__":
    main()
