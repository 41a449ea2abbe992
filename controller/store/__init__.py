"""The only SQL: tables, one writer, queries; the truth that a restart loads again."""
