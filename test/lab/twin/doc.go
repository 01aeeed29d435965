// Package twin holds what two lab machines prove together: the same test binary runs in both, and the first drives. There
// is nothing to import here.
package twin
