! Packs a mask and the signs of a gradient to bits and unpacks them.
!
!   gfortran examples/fortran/gradcodec.f90 examples/fortran/bits.f90 -o bits -lgradcodec
!   ./bits
!
! Fortran's first index is contiguous, in DLPack it is the last one: pass the shape in reverse, or with strides.
program bits
    use gradcodec
    implicit none
    integer(c_int64_t), parameter :: n = 1000
    integer(c_size_t), parameter :: n_chunks = 4
    logical(c_bool), target :: mask(n)
    real(c_float), target :: gradient(n), signs(n)
    integer(c_int8_t), allocatable, target :: packed(:, :)
    integer(c_int64_t), target :: shape(1) = [n], packed_shape(2)
    logical(c_bool), pointer :: back(:)
    integer(c_int8_t), pointer :: bytes(:)
    type(DLManagedTensor) :: source
    type(DLManagedTensor), pointer :: chunk, result
    type(DLTensor) :: values, chunks, unpacked
    type(c_ptr) :: out(n_chunks), whole
    integer :: k

    mask = [(mod(k, 3) == 0, k = 0, n - 1)]
    source%dl_tensor = tensor(c_loc(mask), kDLBool, 8, shape)
    call check(gc_pack_chunks(source, n_chunks, out))
    call c_f_pointer(out(1), chunk)
    call c_f_pointer(chunk%dl_tensor%data, bytes, [gc_chunk_bytes(n, n_chunks)])
    print '(i0, a, i0, a, i0, a, z2)', &
        n, ' logicals: ', n_chunks, ' chunks of ', size(bytes), ' bytes, the first byte is ', bytes(1)
    if (bytes(1) /= int(z'92') - 256) error stop 'not elements 0, 3 and 6'
    call check(gc_unpack_chunks(out, n_chunks, n, whole))
    call c_f_pointer(whole, result)
    call c_f_pointer(result%dl_tensor%data, back, [n])
    print '(a, l1)', 'unpacked, as they were: ', all(back .eqv. mask)
    if (.not. all(back .eqv. mask)) error stop
    call gc_tensor_free(whole)
    do k = 1, int(n_chunks)
        call gc_tensor_free(out(k))
    end do

    ! The functions `_into` write to existing memory. A sign is 1 for positive numbers and zeros.
    gradient = [(sin(real(k, c_float)), k = 0, n - 1)]
    allocate (packed(gc_chunk_bytes(n, n_chunks), n_chunks)) ! each column is a chunk
    packed_shape = [int(n_chunks, c_int64_t), gc_chunk_bytes(n, n_chunks)]
    values = tensor(c_loc(gradient), kDLFloat, 32, shape)
    chunks = tensor(c_loc(packed), kDLUInt, 8, packed_shape)
    unpacked = tensor(c_loc(signs), kDLFloat, 32, shape)
    call check(gc_pack_signs_into(values, GC_BIT_ORDER_BIG, chunks, c_null_ptr))
    call check(gc_unpack_signs_into(chunks, order=GC_BIT_ORDER_BIG, dst=unpacked, stream=c_null_ptr))
    print '(i0, a, i0, a)', 4 * n, ' bytes of real, ', size(packed), ' of signs: +1 and -1 come back'
    if (any(abs(signs - merge(-1.0, 1.0, gradient < 0)) > 0)) error stop 'other signs'

    source%dl_tensor = values
    if (gc_pack_chunks(source, n_chunks, out) == GC_STATUS_OK) error stop 'floats were taken as truth'
    print '(2a)', 'refused: ', last_error()

contains

    ! Describes memory as a tensor, which is valid while the memory and the shape are.
    type(DLTensor) function tensor(data, code, width, shape)
        type(c_ptr), intent(in) :: data
        integer(c_int8_t), intent(in) :: code
        integer, intent(in) :: width
        integer(c_int64_t), intent(in), target, contiguous :: shape(:)
        tensor%data = data
        tensor%code = code
        tensor%bits = int(width, c_int8_t)
        tensor%ndim = size(shape)
        tensor%shape = c_loc(shape)
    end function

    subroutine check(status)
        integer(c_int32_t), intent(in) :: status
        if (status /= GC_STATUS_OK) error stop last_error()
    end subroutine
end program
