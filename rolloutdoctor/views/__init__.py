"""Views of a report: each file renders one format to text and knows nothing but findings."""
