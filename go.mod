module github.com/headrace/headrace

go 1.26
