"""The earlier place of the token dump; stays for a release."""
