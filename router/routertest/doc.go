// Package routertest has fake workers that speak the native dialect over real sockets and are strict about it: they
// check tickets, count the blocks they hold, and break when they are told to.
package routertest
