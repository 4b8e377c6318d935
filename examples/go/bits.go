// A mask and the signs of a gradient to bits and back, by cgo.
//
//	export CGO_CFLAGS=$(pkg-config --cflags gradcodec) CGO_LDFLAGS=$(pkg-config --libs gradcodec)
//	go run examples/go/bits.go
//
// cgo lets no Go pointer stand in what C is given, so a DLTensor of Go's cannot describe a slice. Tensors are made by
// the library here, in memory of C's, which Go reads and writes as a slice. (Go 1.21's runtime.Pinner keeps a slice of
// your own in place: then gc_tensor_from_pointer makes a tensor of it, without a copy.)
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

// Tensor is a tensor of the library, to be closed.
type Tensor struct{ managed *C.DLManagedTensor }

// Close releases the tensor, and with it the memory of its slices.
func (t Tensor) Close() { C.gc_tensor_free(t.managed) }

func (t Tensor) view() *C.DLTensor { return &t.managed.dl_tensor }

// slice is the memory of a contiguous tensor of n elements of that type.
func slice[T any](t Tensor, n int) []T { return unsafe.Slice((*T)(t.view().data), n) }

// call turns a failure into an error with the library's sentence. The sentence is the thread's, and a goroutine may
// continue on another thread after any call: so it is locked to one.
func call(function func() C.gc_status_t) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if function() != C.GC_STATUS_OK {
		return errors.New(C.GoString(C.gc_last_error()))
	}
	return nil
}

// empty makes a tensor, whose elements are to be written.
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

// The functions `_into` write to tensors that are there.
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
