/* A library with a name like Python's, but without Python's functions. */
int of_no_interest(void);

int of_no_interest(void) {
    return 0;
}
