package transfer

// Target, Write and the piece header: what passes between the engine and a transport's lanes.
type Target interface{}

// Write is one piece to be sent.
type Write struct{}
