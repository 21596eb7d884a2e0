// Package docpage reads a page of the documentation as a program: its fenced blocks are what a reader types,
// in order, and the blocks of the language text behind them are what the reader sees. internal/lab/e2e runs
// the pages (TestThePagesWorkAsWritten).
//
// What a block is comes from its language and the words behind it in the fence's line, which a rendered page
// does not show:
//
//	sh         commands for bash; what they export and the folder they go to stay for later blocks
//	sql        statements for psql, in the database of the page
//	(any)      a block whose first line is a comment "file: NAME" is a file in the folder, and not run
//	text       directly behind a block that is run: the output that it must have; elsewhere nothing
//	exit=N     the block must end with exit code N, not 0 (sql: 3 is an error of a statement)
//	eventually a block without side effects: run again until its output is as it must be
//	norun      not for the test: what needs something that a test cannot have
//
// A sh block whose last command ends in " &" runs in the background until the end of the page, or until a
// block "kill %N" ends the N-th of them; the output behind it is what it must have printed by and by, from
// its beginning. In an output "…" stands for anything within its line, and alone on a line for any number of
// lines, none too.
package docpage
