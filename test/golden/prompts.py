"""Prompts for golden.py: chat, prose, code, other languages, numbers, from one token to more than a thousand."""

PROSE = """The mill stood where the river left the hills. Above it a wooden channel, the headrace, carried water along
the slope to the wheel, and whoever kept the headrace kept the mill. In spring the miller's daughter walked it every
morning with a rake, clearing branches and drowned leaves before they could reach the gate. She knew every plank. A
board that hummed was sound, one that was silent had begun to rot, and one that dripped would be mended before noon.
The village brought barley and rye, and took home flour, and nobody asked how the water found its way to the wheel.
One year the rain did not stop. The river rose a hand's breadth an hour, brown and loud, and carried fences, then
trees, then half a barn. The miller wanted to close the gate and wait. His daughter looked at the channel and said
that a closed gate would only make the water choose its own way, and that water chooses badly. They opened the
spillway instead, board by board, and let the flood pass beside the wheel into the meadow below. """

CODE = '''package main

import "fmt"

// gcd returns the greatest common divisor of a and b.
func gcd(a, b int) int {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

func main() {
	for i := 1; i <= 10; i++ {
		fmt.Println(i, gcd(i, 60))
	}
'''

PROMPTS = [
    "The",
    "The capital of France is",
    "<|im_start|>system\nYou are a helpful AI assistant.<|im_end|>\n<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
    "Il était une fois, dans un village au bord de la mer, un pêcheur qui",
    "1, 1, 2, 3, 5, 8, 13, 21, 34,",
    CODE,
    PROSE,
    PROSE + CODE + PROSE.upper() + "\n".join(f"{i} times {i} is {i * i}." for i in range(1, 40)) + "\n" + PROSE,
]
