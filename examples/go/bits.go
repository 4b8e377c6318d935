// Packs a mask and the signs of a gradient to bits and unpacks them, by cgo.
//
//	export CGO_CFLAGS=$(pkg-config --cflags gradcodec) CGO_LDFLAGS=$(pkg-config --libs gradcodec)
//	go run examples/go/bits.go
//
// cgo forbids Go pointers in memory that is passed to C, so a DLTensor of Go cannot describe a slice. Here the library
// allocates tensors in C memory, which Go reads and writes as slices. (Go 1.21's runtime.Pinner pins a slice of your
// own: then gc_tensor_from_pointer makes a tensor of it, without a copy.)
package main

// #include <gradcodec.h>
import "C"

import (
	"bytes"
	"errors"
	"fmt"
	"log"
	"math"
	"runtime"
	"unsafe"
)

const n, nChunks = 1000, 4

var (
	cpu      = C.DLDevice{device_type: C.kDLCPU}
	boolean  = C.DLDataType{code: C.kDLBool, bits: 8, lanes: 1}
	uint8s   = C.DLDataType{code: C.kDLUInt, bits: 8, lanes: 1}
	float32s = C.DLDataType{code: C.kDLFloat, bits: 32, lanes: 1}
)

// Tensor is a tensor of the library. The caller must close it.
type Tensor struct{ managed *C.DLManagedTensor }

// Close releases the tensor, and with it the memory of its slices.
func (t Tensor) Close() { C.gc_tensor_free(t.managed) }

func (t Tensor) view() *C.DLTensor { return &t.managed.dl_tensor }

// slice returns the memory of a contiguous tensor of n elements of type T.
func slice[T any](t Tensor, n int) []T { return unsafe.Slice((*T)(t.view().data), n) }

// call turns a failure into an error with the library's message. The message is thread-local, and a goroutine may move
// to another thread after any call, so call locks it to its thread.
func call(function func() C.gc_status_t) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if function() != C.GC_STATUS_OK {
		return errors.New(C.GoString(C.gc_last_error()))
	}
	return nil
}

// empty makes a tensor with undefined elements.
func empty(dtype C.DLDataType, shape ...C.int64_t) (t Tensor, err error) {
	err = call(func() C.gc_status_t {
		return C.gc_tensor_empty(cpu, dtype, C.int32_t(len(shape)), &shape[0], &t.managed)
	})
	return
}

func packChunks(src Tensor) (chunks [nChunks]Tensor, err error) {
	err = call(func() C.gc_status_t { return C.gc_pack_chunks(src.managed, nChunks, &chunks[0].managed) })
	return
}

func maskThereAndBack() error {
	mask, err := empty(boolean, n)
	if err != nil {
		return err
	}
	defer mask.Close()
	truth := slice[bool](mask, n)
	for k := range truth {
		truth[k] = k%3 == 0
	}
	chunks, err := packChunks(mask)
	if err != nil {
		return err
	}
	for _, chunk := range chunks {
		defer chunk.Close()
	}
	first := slice[byte](chunks[0], 32)[0]
	var back Tensor
	err = call(func() C.gc_status_t { return C.gc_unpack_chunks(&chunks[0].managed, nChunks, n, &back.managed) })
	if err != nil {
		return err
	}
	defer back.Close()
	same := bytes.Equal(slice[byte](back, n), slice[byte](mask, n))
	fmt.Printf("%d bools in %d chunks, the first byte is 0x%02x; unpacked, as they were: %v\n", n, nChunks, first, same)
	if first != 0x92 || !same { // elements 0, 3 and 6
		return errors.New("not as expected")
	}
	return nil
}

// The functions `_into` write to existing tensors.
func signsThereAndBack() error {
	gradient, err := empty(float32s, n)
	if err != nil {
		return err
	}
	defer gradient.Close()
	chunks, err := empty(uint8s, nChunks, C.gc_chunk_bytes(n, nChunks))
	if err != nil {
		return err
	}
	defer chunks.Close()
	values := slice[float32](gradient, n)
	for k := range values {
		values[k] = float32(math.Sin(float64(k)))
	}
	if err := call(func() C.gc_status_t {
		return C.gc_pack_signs_into(gradient.view(), C.GC_BIT_ORDER_BIG, chunks.view(), nil)
	}); err != nil {
		return err
	}
	signs, err := empty(float32s, n)
	if err != nil {
		return err
	}
	defer signs.Close()
	if err := call(func() C.gc_status_t {
		return C.gc_unpack_signs_into(chunks.view(), nil, C.GC_BIT_ORDER_BIG, signs.view(), nil)
	}); err != nil {
		return err
	}
	for k, sign := range slice[float32](signs, n) {
		if values[k] < 0 && sign != -1 || values[k] >= 0 && sign != 1 {
			return fmt.Errorf("element %d is %v and has the sign %v", k, values[k], sign)
		}
	}
	fmt.Printf("%d bytes of float32 in %d: +1 and -1 come back\n", 4*n, nChunks*32)
	_, refusal := packChunks(gradient)
	fmt.Println("refused:", refusal)
	return nil
}

func main() {
	for _, show := range []func() error{maskThereAndBack, signsThereAndBack} {
		if err := show(); err != nil {
			log.Fatal(err)
		}
	}
}
