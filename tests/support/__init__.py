"""What tests share: reference implementations, small models, instruments."""
