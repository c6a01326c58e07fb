"""Where tasks come from: folders in Harbor's layout and rows of data; which of them are taken."""
