import sys

from gvm_stream.cli import main

if __name__ == "__main__":  # verifier workers import this module again under another name
    sys.exit(main())
