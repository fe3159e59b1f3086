"""What several lanes of the tests share."""
