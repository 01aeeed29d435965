// Package importrules holds the order in which packages may import each other; its test reads every Go file and
// checks it. There is nothing to import here.
//
//	cmd -> {router, worker, transfer/node, bench, internal} -> transfer -> nothing of ours
package importrules
