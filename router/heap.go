package router

import "sync"

// heapRoom is what a router's process lets its garbage grow by at the least. Its live heap is a few megabytes, and a collector that
// runs whenever a few more have come takes a tenth of the processor's time. Nothing is written there, so that it takes no
// memory itself.
const heapRoom = 32 << 20

var room struct {
	once sync.Once
	b    []byte
}

// ReserveHeap makes the collector run less often, for as long as the process lives. A process that is a router calls it once.
func ReserveHeap() { room.once.Do(func() { room.b = make([]byte, heapRoom) }) }
