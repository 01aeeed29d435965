// Package broken breaks a lab machine in many ways, one after another, and has `headrace doctor` mend it: it must name the
// fault, and the command that it prints is run as it stands. It knows the binary alone.
package broken
