"""What commands return and views render: plain data, errors and escaped text. Imports nothing of this package."""
