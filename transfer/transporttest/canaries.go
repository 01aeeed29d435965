package transporttest

// Overwrite writes canaries into the blocks where the transfer landed, once it has ended there.
func (f *Flight) Overwrite() { f.To.t.Helper(); call[bool](f.To, "Overwrite", f.Nonce) }

// Canaries looks whether all of them are there still.
func (m *Machine) Canaries() { m.t.Helper(); call[bool](m, "Canaries", 0) }
