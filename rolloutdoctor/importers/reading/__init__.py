"""Files as importers read them: lines of JSON, Parquet, torch.save, and checks of the values in them."""
