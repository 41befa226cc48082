"""Results that commands return and views render: plain data, errors, escaped text. Imports nothing of this package."""
