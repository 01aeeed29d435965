package routertest

func (c *EngineCall) parseNixl() error   { return nil }
func (c *EngineCall) nixlPrefill() error { return nil }
func (c *EngineCall) nixlDecode() error  { return nil }
