package e2e

import "time"

// The limits that the tests hold the program to.
const (
	// noticeLimit is from a signal to the client's last byte.
	noticeLimit = 5 * time.Second
	// waitShort is for what follows at once and waits for nothing but a busy machine.
	waitShort = 5 * time.Second
	// waitRestart is for a killed child to be there again.
	waitRestart = 15 * time.Second
	// waitHang is when a test gives up on an answer that should have come long ago.
	waitHang = 20 * time.Second
)
