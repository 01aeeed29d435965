package prefix

// progress is how far a source's events were heard.
type progress struct{}
