"""The benchmark page: tables and pictures from kept rows."""
