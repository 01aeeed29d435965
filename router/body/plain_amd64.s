#include "textflag.h"

// func plainAVX2(b *byte, n int) int
TEXT ·plainAVX2(SB), NOSPLIT, $0-24
	MOVQ b+0(FP), SI
	MOVQ n+8(FP), CX
	XORQ AX, AX
	MOVQ $0x2222222222222222, DX // quotes
	MOVQ DX, X0
	VPBROADCASTQ X0, Y0
	MOVQ $0x5c5c5c5c5c5c5c5c, DX // backslashes
	MOVQ DX, X1
	VPBROADCASTQ X1, Y1
	MOVQ $0x1f1f1f1f1f1f1f1f, DX // the highest control character
	MOVQ DX, X2
	VPBROADCASTQ X2, Y2

loop:
	CMPQ AX, CX
	JGE  done
	VMOVDQU (SI)(AX*1), Y3
	VPCMPEQB Y0, Y3, Y4
	VPCMPEQB Y1, Y3, Y5
	VPMINUB Y2, Y3, Y6
	VPCMPEQB Y6, Y3, Y6 // the lesser of a byte and 0x1f is the byte
	VPOR Y5, Y4, Y4
	VPOR Y6, Y4, Y4
	VPMOVMSKB Y4, DX
	TESTL DX, DX
	JNZ  found
	ADDQ $32, AX
	JMP  loop

found:
	BSFL DX, DX
	ADDQ DX, AX

done:
	VZEROUPPER
	MOVQ AX, ret+16(FP)
	RET
