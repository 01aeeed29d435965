// Package script is what the lab tells its virtual machines to do.
package script

// Path is where a machine finds its script.
const Path = "/lab.json"

// ExitMark starts the last line of a machine's report; the exit status follows.
const ExitMark = "headrace-lab: exit status "

// Script is for all machines of a run; the kernel's command line (lab.vm=1) says which one this is.
type Script struct {
	Modules  []string // to be loaded, in this order
	Machines []Machine
}

// Machine is one machine's part.
type Machine struct {
	Setup    [][]string // commands that must succeed, before all others
	Commands []Command
}

// Command is one thing to run. The machine's exit status is that of the first one that fails.
type Command struct {
	Args []string
	Env  []string
	Dir  string
}
