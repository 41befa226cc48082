"""Pure: how scores become advantages. One file for each family of estimators; `table` lists them."""
