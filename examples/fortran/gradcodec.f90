! The part of gradcodec.h that bits.f90 uses, for iso_c_binding: DLPack's structs and functions for bits, signs and
! tensors. gradcodec.h documents them; other functions are declared in the same way.
module gradcodec
    use, intrinsic :: iso_c_binding
    implicit none

    integer(c_int32_t), parameter :: kDLCPU = 1
    integer(c_int8_t), parameter :: kDLInt = 0, kDLUInt = 1, kDLFloat = 2, kDLBool = 6
    integer(c_int32_t), parameter :: GC_STATUS_OK = 0, GC_BIT_ORDER_BIG = 0, GC_BIT_ORDER_LITTLE = 1

    type, bind(c) :: DLTensor
        type(c_ptr) :: data = c_null_ptr
        integer(c_int32_t) :: device_type = kDLCPU, device_id = 0, ndim = 0
        integer(c_int8_t) :: code = 0, bits = 0
        integer(c_int16_t) :: lanes = 1
        type(c_ptr) :: shape = c_null_ptr, strides = c_null_ptr
        integer(c_int64_t) :: byte_offset = 0
    end type

    type, bind(c) :: DLManagedTensor
        type(DLTensor) :: dl_tensor
        type(c_ptr) :: manager_ctx = c_null_ptr
        type(c_funptr) :: deleter = c_null_funptr
    end type

    interface
        function gc_last_error() bind(c)
            import c_ptr
            type(c_ptr) :: gc_last_error
        end function
        function gc_chunk_bytes(n_elements, n_chunks) bind(c)
            import c_int64_t, c_size_t
            integer(c_int64_t), value :: n_elements
            integer(c_size_t), value :: n_chunks
            integer(c_int64_t) :: gc_chunk_bytes
        end function
        function gc_pack_chunks(src, n_chunks, out) bind(c)
            import DLManagedTensor, c_int32_t, c_ptr, c_size_t
            type(DLManagedTensor), intent(in) :: src
            integer(c_size_t), value :: n_chunks
            type(c_ptr), intent(inout) :: out(*)
            integer(c_int32_t) :: gc_pack_chunks
        end function
        function gc_unpack_chunks(chunks, n_chunks, n_elements, out) bind(c)
            import c_int32_t, c_int64_t, c_ptr, c_size_t
            type(c_ptr), intent(in) :: chunks(*)
            integer(c_size_t), value :: n_chunks
            integer(c_int64_t), value :: n_elements
            type(c_ptr), intent(inout) :: out
            integer(c_int32_t) :: gc_unpack_chunks
        end function
        function gc_pack_signs_into(src, order, dst, stream) bind(c)
            import DLTensor, c_int32_t, c_ptr
            type(DLTensor), intent(in) :: src
            integer(c_int32_t), value :: order
            type(DLTensor), intent(inout) :: dst
            type(c_ptr), value :: stream
            integer(c_int32_t) :: gc_pack_signs_into
        end function
        function gc_unpack_signs_into(src, scales, order, dst, stream) bind(c)
            import DLTensor, c_int32_t, c_ptr
            type(DLTensor), intent(in) :: src
            type(DLTensor), intent(in), optional :: scales ! NULL if omitted
            integer(c_int32_t), value :: order
            type(DLTensor), intent(inout) :: dst
            type(c_ptr), value :: stream
            integer(c_int32_t) :: gc_unpack_signs_into
        end function
        subroutine gc_tensor_free(tensor) bind(c)
            import c_ptr
            type(c_ptr), value :: tensor
        end subroutine
    end interface

contains

    ! Returns the message of this thread's last failure.
    function last_error() result(sentence)
        character(:), allocatable :: sentence
        character(c_char), pointer :: letters(:)
        integer :: length
        call c_f_pointer(gc_last_error(), letters, [huge(0)])
        length = 0
        do while (letters(length + 1) /= c_null_char)
            length = length + 1
        end do
        allocate (character(length) :: sentence)
        sentence = transfer(letters(:length), sentence)
    end function
end module
